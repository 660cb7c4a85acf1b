"""`plan`: from machines and links to a topology that reaches a utilization, and why."""
