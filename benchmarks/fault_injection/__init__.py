"""Deliberate faults (kills, freezes, broken links, full disks) that show what a run survives."""
