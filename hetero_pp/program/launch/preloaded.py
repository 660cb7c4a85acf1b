"""Imports of the fork server, once for all processes of a launch. Nothing else imports this module."""

from __future__ import annotations

import importlib

from hetero_pp.program.launch.fork_server import importing

MODULES = ("hetero_pp.program.launch.member_process", "hetero_pp.program.launch.supervisor")

with importing():  # which also leaves their objects out of the collections of all forked processes
    for name in MODULES:
        importlib.import_module(name)
