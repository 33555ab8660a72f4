"""The TPU compiler's report on a program, from a machine without TPUs."""
