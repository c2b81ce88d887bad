"""Which GPUs there are, who holds them, and what is left of their memory."""
