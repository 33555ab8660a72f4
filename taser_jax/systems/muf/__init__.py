"""DPR-MUF: network, step, confidence, fusion, commands, stages, figures."""
