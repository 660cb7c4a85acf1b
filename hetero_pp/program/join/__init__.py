"""Admits hosts to a run by tickets, and joins a run with a ticket."""
