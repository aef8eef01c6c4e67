"""What each step computes: who waits, who runs, and how many tokens each is given."""
