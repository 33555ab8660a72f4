#!/usr/bin/env bash
# Copies and installs this checkout on a list of machines that ssh reaches, and runs taser there. When a machine is lost
# or stopped it starts over, and taser resumes from MODEL_DIR. --help: options.
exec python3 -u "$(dirname "${BASH_SOURCE[0]}")/launch.py" hosts "$@"
