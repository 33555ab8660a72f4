"""What the TPU compiler says of a program, from a machine without TPUs."""
