"""The user's environment: its contract, how it is found and loaded, its sessions, tools and scores."""
