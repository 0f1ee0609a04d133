"""What a backbone costs and what it looks at: parameters, FLOPs, attention maps, and pictures of them."""
