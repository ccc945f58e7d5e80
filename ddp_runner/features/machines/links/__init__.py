"""What leads from one machine to another: connections, and files in folders that they may share."""
