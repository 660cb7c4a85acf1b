"""Reproducing tables: experiments are data, rows are trained once, every claim gets a verdict."""
