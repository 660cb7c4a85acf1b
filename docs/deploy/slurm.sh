#!/bin/bash
# Trains a run as a Slurm job that is requeued until the run is over: sbatch slurm.sh configs/quickstart.yaml
# A run of this name that is unfinished is resumed. Slurm's own logs hold one JSON object a line.
#SBATCH --job-name=hetero-pp
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# USR1 comes two minutes before the limit. hetero-pp then saves the state of all members and exits with 130.
set -uo pipefail

config=$1
name=$(sed -n 's/^name: *//p' "$config")
resume=()
if [ -e "runs/$name/config.yaml" ]; then
    resume=(--resume)
fi

stopped=no
hetero-pp launch "$config" "${resume[@]}" --metrics 9464 --log-format json &
launcher=$!
trap 'stopped=yes; kill -USR1 "$launcher"' USR1
wait "$launcher"
code=$?
if [ "$stopped" = yes ]; then # the signal ended the first wait
    wait "$launcher"
    code=$?
fi
if [ "$stopped" = yes ] && [ "$code" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
