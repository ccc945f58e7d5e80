"""What supervisor and rank tell each other: reports, orders, and the board that they share."""
