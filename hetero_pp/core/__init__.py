"""Helpers that know nothing of training: errors, units, files, sockets."""
