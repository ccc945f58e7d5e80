"""The other machines of a run: their links, what is known of them, and what one of them does itself."""
