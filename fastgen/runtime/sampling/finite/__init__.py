"""Finds parts of a format that no finite text satisfies, so that no answer begins one."""
