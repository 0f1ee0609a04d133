"""What every other package may use: argument checks, whole files, locks, addresses, older versions of torch."""
