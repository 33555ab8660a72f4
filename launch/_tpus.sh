# Sourced by the TPU launchers: kinds of TPU, the launchers' common options, and the plan that they print.
# shellcheck shell=bash disable=SC2034,SC2154  # options are set by parse_arguments; results are the script's
#
# Sources of the table, read in November 2026: cloud.google.com/tpu/docs/runtimes (runtimes for JAX), .../docs/v4
# and .../docs/v5p (types count TensorCores), .../docs/v5e and .../docs/v6e (types count chips), .../docs/quota.
# TPU7x: "you must use Google Kubernetes Engine", .../docs/queued-resources.

# Per kind: prefix of the type, cores per chip, runtime, prefix of its quotas' ids.
TPUS='
v2        2 tpu-ubuntu2204-base TPUV2
v3        2 tpu-ubuntu2204-base TPUV3
v4        2 tpu-ubuntu2204-base TPUV4
v5p       2 v2-alpha-tpuv5      TPUV5P
v5litepod 1 v2-alpha-tpuv5-lite TPUV5sLitepod
v6e       1 v2-alpha-tpuv6e     TPUV6E
'
POD_OPTIONS="name zone project type version delete data setup reservation max_run_duration network subnetwork \
service_account labels data_disk retries retry_seconds"
POD_SWITCHES="spot reserved internal_ip iap skip_install gcloud"
name='' zone='' project='' type='' version='' delete='' data='' setup='' reservation='' max_run_duration=''
network='' subnetwork='' service_account='' labels='' data_disk='' spot='' reserved='' internal_ip='' iap=''
skip_install='' dry_run='' gcloud='' retries=100 retry_seconds=60 kept='' outputs=()
# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
launched_by="$(id -un | tr '[:upper:]' '[:lower:]' | tr -c 'a-z0-9\n' '-')"
launched_by="taser_jax-${launched_by:0:40}"

pod_usage() {
  cat <<'USAGE'
  --version=VERSION    runtime of a new TPU (default: by its type, the table in launch/_tpus.sh)
  --delete=WHEN        when to delete a TPU that the launcher created: success (after the command has finished),
                       always (also after a failure and Ctrl-C), or never. Default: success if all that the command
                       writes goes to a bucket and is there at the end, otherwise never: the MODEL_DIR of
                       `train`, from --gin.NAME=gs://... or a Gin file. Other commands write to the hosts' disks
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --setup=COMMAND      shell command for each host before the run, for example to mount a data disk
  --skip_install       use the checkout that the hosts have already
  --retries=N          new attempts after a preemption, or while there is no capacity (100)
  --retry_seconds=N    pause before each, and between checks of a TPU that is starting (60)
  --dry_run            print the plan and the commands, run nothing

  Options of a new TPU:
  --spot               cheaper; may be preempted at any time
  --reserved           uses the project's reservations
  --reservation=NAME   uses this reservation
  --network=NETWORK --subnetwork=SUBNETWORK
  --internal_ip        no external addresses; ssh uses internal ones, and installing needs Cloud NAT
  --iap                ssh through Identity-Aware Proxy
  --service_account=EMAIL   account of the hosts, for example to read a bucket
  --labels=KEY=VALUE,...
  --data_disk=source=DISK,mode=read-only   attached, not mounted (see --setup); may be repeated
  --gcloud FLAGS...    flags for gcloud's create command, up to --: --gcloud --tags=tpu --
USAGE
}

# Checks the common options, and sets variables that depend on several of them. Older shells treat an empty array as
# unset, hence ${array[@]+...}.
check_pod_options() {
  local label
  require_number 0 retries
  require_number 1 retry_seconds
  require_taser_command
  warn_of_lost_results
  require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
  if [ -z "$type" ]; then
    gcloud="${passed[*]+yes}"
    for label in version spot reserved reservation network subnetwork service_account labels data_disk gcloud; do
      [ -z "${!label}" ] || fail "--$label applies to a TPU that is created: give its --type"
    done
  else
    read_type
  fi
  price="on demand"
  case "${spot:+s}${reserved:+r}${reservation:+r}${max_run_duration:+f}" in
    '') ;;
    s) price="spot: may be preempted at any time" ;;
    r) price="reserved${reservation:+: $reservation}" ;;
    f) price="flex-start: each attempt is ended after $max_run_duration" ;;
    *) fail "choose one of --spot, --reserved, --reservation and --max_run_duration" ;;
  esac
  [ -z "$network$subnetwork" ] || { [ -n "$network" ] && [ -n "$subnetwork" ]; } ||
    fail "--network and --subnetwork go together: a network of one's own has no default subnetwork"
  for label in ${labels//,/ }; do
    [[ "$label" =~ ^[a-z][-a-z0-9_]{0,62}=[-a-z0-9_]{0,63}$ ]] ||
      fail "--labels has '$label', expected KEY=VALUE of lower-case letters, digits, - and _, the key from a letter on"
  done
  check_deletion
  track=() ssh_flags=()
  # gcloud has these in its alpha commands only.
  [ -z "$reservation$max_run_duration$iap" ] || track=(alpha)
  if [ -n "$iap" ]; then
    ssh_flags=(--tunnel-through-iap)
  elif [ -n "$internal_ip" ]; then
    ssh_flags=(--internal-ip)
  fi
  creation=(
    ${spot:+--spot} ${reserved:+--reserved} ${reservation:+"--reservation=$reservation"}
    ${max_run_duration:+--provisioning-model=flex-start "--max-run-duration=$max_run_duration"}
    ${network:+"--network=$network"} ${subnetwork:+"--subnetwork=$subnetwork"}
    ${internal_ip:+--internal-ips} ${service_account:+"--service-account=$service_account"}
    ${data_disks[@]+"${data_disks[@]/#/--data-disk=}"} "--labels=launcher=$launched_by${labels:+,$labels}"
    ${passed[@]+"${passed[@]}"}
  )
}

# Sets `delete`, and `kept`: the reason why nothing is deleted even on success. If nobody has asked for a deletion,
# `outputs` gets the addresses that must hold results before it.
check_deletion() {
  local resolver resolved address
  resolver="$(dirname "${BASH_SOURCE[0]}")/_outputs.py"
  case "$delete" in
    always | success) ;;
    never) kept="as you say" ;;
    '')
      delete=never
      if [ -z "$type" ]; then
        kept="the launcher did not create it"
      elif resolved="$(python3 "$resolver" ${skip_install:+--line_only} "${rest[@]}")"; then
        delete=success
        while IFS= read -r address; do outputs+=("$address"); done <<<"$resolved"
      else
        kept="${resolved:-where the results go cannot be told}"
      fi
      ;;
    *) fail "--delete is '$delete', expected always, success or never" ;;
  esac
}

# read_type: sets `chips` and `quota` of one slice of `type`, and `version` unless it is given.
read_type() {
  local kind="${type%-*}" size="${type##*-}" prefix cores runtime
  chips='' quota=''
  [[ "$kind" != tpu7x && "$kind" != v7x ]] ||
    fail "--type is '$type': there are no TPU VMs of TPU7x; use launch/gke_xpk.sh"
  [[ "$type" =~ ^[a-z0-9]+-[1-9][0-9]*$ ]] || fail "--type is '$type', expected KIND-SIZE, for example v5litepod-16"
  while read -r prefix cores runtime quota; do
    [ "$prefix" = "$kind" ] || continue
    ((size % cores == 0)) || fail "--type is '$type', expected an even number of cores: $kind has two to a chip"
    chips=$((size / cores))
    version="${version:-$runtime}"
    return
  done <<<"$TPUS"
  quota=TPU
  [ -n "$version" ] ||
    fail "--type is '$type'; known are$(awk 'NF { printf " %s-N", $1 }' <<<"$TPUS"). For another, give --version=RUNTIME"
}

# print_plan COUNT: prints what the launcher will do, as comments before the commands that --dry_run prints.
print_plan() {
  local what="$1 TPU slice" class='' address
  if [ -z "$type" ]; then
    echo "# $name in $zone: a TPU that exists; none is created"
  else
    [ "$1" = 1 ] || what+=s
    [ -z "$spot$max_run_duration" ] || class=Preemptible
    echo "# $name in $zone: $what of $type${chips:+, $(($1 * chips)) chips}, runtime $version"
    echo "# price: $price"
    echo "# quota: ${quota}${class}PerProjectPerZoneForTPUAPI or a similar one; yours: gcloud beta quotas info list" \
      "--service=tpu.googleapis.com --project=${project:-PROJECT} --filter=quotaId:$quota"
  fi
  echo "# retries: $retries, after a preemption or while there is no capacity, $retry_seconds s apart"
  case "$delete" in
    always) what="when the launcher ends, however it ends" ;;
    success)
      what="after the command has finished"
      for address in ${outputs[@]+"${outputs[@]}"}; do what+=", if $address is not empty"; done
      what+="; after a failure or Ctrl-C the TPU stays and is billed"
      ;;
    never) what="never ($kept): the TPU stays and is billed" ;;
  esac
  echo "# deletion (--delete=$delete): $what. By hand: $(delete_command)"
}
