"""The user's environment: what it promises, how it is found, how its episodes are scored."""
