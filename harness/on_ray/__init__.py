"""A list of configs on a Ray cluster: Ray places them, nodes send their records back."""
