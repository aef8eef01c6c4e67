"""The memory ledger, and sizes that fit."""
