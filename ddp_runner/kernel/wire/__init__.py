"""Messages between supervisor and rank: reports, orders, and the board that both share."""
