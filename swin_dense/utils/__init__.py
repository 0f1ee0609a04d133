"""Shared helpers: argument checks, atomic file writes and locks, addresses, compatibility with older torch versions."""
