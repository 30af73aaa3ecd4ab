"""Calls into the user's code: in threads and processes, each with a deadline."""
