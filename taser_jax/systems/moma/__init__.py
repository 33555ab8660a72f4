"""MoMA: memories, attention, commands, stages, figures."""
