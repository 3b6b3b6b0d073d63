"""Configurations that run a plan with other programs, each value with its reason."""

from uma.plan.emit.server import Server, server_command

__all__ = ["Server", "server_command"]
