"""The published recipes: their files and results, and complete configs for a user's own data."""
