"""Meshes, sharding rules, hosts."""
