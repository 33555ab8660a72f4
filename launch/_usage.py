"""Usage texts of the launchers; `_options` reads the options from them.

An option's line begins with two spaces and dashes. `=N` is a number, `FLAGS...` are words up to
`--`, and an option that "may be repeated" has a list of values. A number in brackets at the end of
its text is its default.
"""

# ruff: noqa: E501 (texts for terminals of 120 columns)
from __future__ import annotations

_RUN = """
  --skip_install       use the checkout that the hosts have already, in ~/taser_jax
  --env=NAME[=VALUE]   a variable for taser on each host; without VALUE, its value here; may be repeated
  --max_hours=HOURS    end the run after this time (with its TPU, if the launcher created it; not with
                       --delete=never); the exit status is 124
  --retries=N          new attempts after a preemption or a lost host, or while there is no capacity (100)
  --retry_seconds=N    pause before each, and between checks of what is starting (60)
  --dry_run            print the plan and the commands, run nothing"""
_POD = f"""
  --project=PROJECT    its project (gcloud's own setting)
  --delete=WHEN        when to delete a TPU that the launcher created: success (after the command has finished),
                       always (also after a failure and Ctrl-C), or never. Default: success if all that the
                       command writes goes to a bucket and is there at the end, otherwise never: the MODEL_DIR of
                       `train`, from --gin.NAME=gs://... or a Gin file. Other commands write to the hosts' disks
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --setup=COMMAND      shell command for each host before the run, for example to mount a data disk{_RUN}
  --internal_ip        no external addresses; ssh uses internal ones, and installing needs Cloud NAT
  --iap                ssh through Identity-Aware Proxy

  Options of a new TPU:
  --version=VERSION    runtime (default: by its type, the table in launch/_tables.py)
  --price_per_hour=DOLLARS   what all its chips cost, if you know it better than that table
  --spot               cheaper; may be preempted at any time
  --reserved           uses the project's reservations
  --reservation=NAME   uses this reservation
  --network=NETWORK    with --subnetwork
  --subnetwork=SUBNETWORK
  --service_account=EMAIL   account of the hosts, for example to read a bucket
  --labels=KEY=VALUE,...
  --data_disk=source=DISK,mode=read-only   attached, not mounted (see --setup); may be repeated
  --gcloud FLAGS...    flags for gcloud's create command, up to --: --gcloud --tags=tpu --
"""
USAGE = {
    "tpu_vm": f"""usage: launch/tpu_vm.sh --name=NAME --zone=ZONE [options] -- COMMAND [FLAGS...]
       launch/tpu_vm.sh --attach NAME --zone=ZONE        follows what runs there

  launch/tpu_vm.sh --name=taser --zone=us-central2-b --type=v4-32 --spot --data=gs://BUCKET/tokens -- \\
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the TPU VM
  --attach=NAME        the TPU VM whose run to follow: the command goes on while no launcher is connected
  --zone=ZONE          its zone
  --type=TYPE          create the TPU if it does not exist, and again after a preemption: v4-32, v5litepod-16{_POD}
  COMMAND              a taser command; the launcher adds --multihost

Only a TPU that was preempted or terminated is deleted and created again. For flex-start use
launch/tpu_multislice.sh with --slices=1.

Exits with 0 (finished), 2 (a problem to fix; see the message), 75 (preempted or no capacity, and no retries left),
124 (--max_hours), or the status with which installation, copying data or taser failed. The last line says whether
the TPU still runs.""",
    "tpu_multislice": f"""\
usage: launch/tpu_multislice.sh --name=NAME --zone=ZONE --type=TYPE --slices=N [options] -- COMMAND [FLAGS...]
       launch/tpu_multislice.sh --attach NAME --zone=ZONE --slices=N        follows what runs there

  launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 --data=gs://BUCKET/tokens -- \\
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the queued resource; slices are NAME-0, NAME-1, ...
  --attach=NAME        the queued resource whose run to follow
  --zone=ZONE          its zone
  --type=TYPE          type of one slice: v4-32, v5litepod-64
  --slices=N           number of slices: 2 or more; 1 with --max_run_duration
  --max_run_duration=TIME   flex-start: waits for capacity, and ends after this time, for example 10h{_POD}
  COMMAND              a taser command; the launcher adds --multihost and, to `train` without
                       MESH_REPLICA or MeshConfig.across_slices, --gin.MESH_REPLICA=N

Exit statuses and the last line are those of launch/tpu_vm.sh.""",
    "hosts": f"""usage: launch/hosts.sh --hosts=HOST,HOST,... [options] -- COMMAND [FLAGS...]

  launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda --data=gs://BUCKET/tokens -- \\
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser --gin.TOKEN_STORE=data

  --hosts=HOST,...     names for ssh; the first is host 0, which the others must reach
  --attach             follow what runs there; without a command
  --port=N             port of host 0 for JAX's coordinator (8476)
  --extra=EXTRA        the package's extra to install: cuda or tpu (none)
  --data=PLACE         a directory or gs://PLACE that each host copies to the folder `data` before the first step
  --setup=COMMAND      shell command for each host before the run{_RUN}
  COMMAND              a taser command; the launcher adds --multihost

ssh must not ask for a password. Exit statuses are those of launch/tpu_vm.sh.""",
    "slurm": """usage: launch/slurm.sh --nodes=N [options] -- COMMAND [FLAGS...]

  launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \\
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser --gin.TOKEN_STORE=/shared/tokens

  --nodes=N            number of nodes; inside an allocation (sbatch, salloc) those of this step
  --env=NAME[=VALUE]   a variable for taser; Slurm passes those of this shell on; may be repeated
  --retries=N          new attempts after a preemption or a lost node (100)
  --retry_seconds=N    pause before each (60)
  --dry_run            print the plan and the command, run nothing
  --slurm FLAGS...     flags for srun, up to --: --slurm --partition=gpu --gpus-per-node=8 --
  COMMAND              a taser command; the launcher adds --multihost

The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
Exit statuses are those of launch/tpu_vm.sh. To end a run after a time: --slurm --time=10:00:00 --""",
    "gke_xpk": """\
usage: launch/gke_xpk.sh --cluster=CLUSTER --workload=NAME --type=TYPE --image=IMAGE [options] -- COMMAND [FLAGS...]

  launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 --data=gs://BUCKET/tokens \\
    --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 -- \\
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --cluster=CLUSTER    made by `xpk cluster create`
  --workload=NAME      up to 40 lower-case letters, digits and dashes; a new one for each run
  --type=TYPE          TPU type of one slice: v5litepod-64, tpu7x-8
  --image=IMAGE        image to build from this checkout (launch/Dockerfile) and push; pods get it by its digest
  --skip_build         use the image that is in the registry already: IMAGE@sha256:...
  --slices=N           number of slices (1)
  --zone=ZONE          the cluster's zone (xpk's own setting)
  --project=PROJECT    its project (gcloud's own setting)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data. Each restart copies it again, since its pods are new
  --env=NAME[=VALUE]   a variable for taser on each host; without VALUE, its value here; may be repeated
  --max_hours=HOURS    end each start of the workload after this time; it fails, and its nodes are free
  --price_per_hour=DOLLARS   what all chips cost, if you know it better than the list in launch/_tables.py
  --retries=N          restarts after a preemption (100)
  --grace_seconds=N    time between SIGTERM and the end of a pod, for taser to finish a step and save (300)
  --dry_run            print the plan and the commands, run nothing
  --xpk FLAGS...       flags for `xpk workload create`, up to --: --xpk --spot --storage=tokens --
  COMMAND              a taser command; the launcher adds --multihost and, to `train`,
                       --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does""",
}
