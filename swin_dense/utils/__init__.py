"""Shared helpers: argument checks, atomic file writes, locks, addresses, compatibility with older torch versions."""
