"""A user's values: nested containers, and what is sent of them."""
