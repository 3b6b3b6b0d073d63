"""The facts of a capacity report, each computed once and shown by every form of it."""
