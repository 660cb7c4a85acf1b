"""Lets others into a run by tickets, and joins one by a ticket."""
