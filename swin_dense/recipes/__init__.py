"""The published recipes: where they lie, what was published for them, and one written whole for a user's own data."""
