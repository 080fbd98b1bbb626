#!/usr/bin/env bash
# tools/slurm.sbatch in a Slurm of its own, of one node: a signal as before the end of the job's time saves and puts it back
# into the queue, a killed rank does where a checkpoint was reached; it goes on from there to its end. srun with each of its
# ways to say who is who; a cancelled job is saved and stays out. Exit code 77: there is no Slurm, or it does not start here.
#   tests/slurm.sh BUILD
set -euo pipefail
export PATH=$PATH:/usr/sbin
source=$(realpath "$(dirname "$0")/..") build=$(realpath "$1") scratch=$(mktemp -d)
skip() { echo "$1"; exit 77; }
for c in slurmctld slurmd sbatch munged; do [ "$(command -v $c)" ] || skip "there is no $c"; done
[ "$(id -u)" = 0 ] || skip "slurmd needs root here"
daemons=()
clean() {
    scancel --user=root
    for _ in $(seq 150); do [ "$(squeue -h)" ] || break; sleep 0.1; done
    kill "${daemons[@]}"
    wait
    rm -rf "$scratch"
}
trap 'clean 2>/dev/null || true' EXIT
cd "$scratch"
export SLURM_CONF=$scratch/slurm.conf PATH=$build:$PATH OMP_NUM_THREADS=1
port=$((30000 + $$ % 1000 * 2))
mkdir state spool
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthInfo=socket=$scratch/munge
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
TmpFS=$scratch
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=10
NodeName=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES
CONF
echo "CgroupPlugin=cgroup/v1" >cgroup.conf
head -c 1024 /dev/urandom >key
chmod 600 key
munged --foreground --force --key-file=key --socket="$scratch/munge" --pid-file=munged.pid --log-file=munged.log --seed-file=seed >munged.out 2>&1 &
daemons+=($!)
slurmctld -D >slurmctld.log 2>&1 &
daemons+=($!)
slurmd -D >slurmd.log 2>&1 &
daemons+=($!)
for _ in $(seq 100); do sinfo -h -o %T 2>/dev/null | grep -q idle && break; sleep 0.1; done
sinfo -h -o %T | grep -q idle || { tail -n 3 ./*.log; skip "Slurm does not start"; }

fail() { echo "$1"; cat slurm-*.out ./*.log; exit 1; }
await() { for _ in $(seq 300); do eval "$1" 2>/dev/null && return; sleep 0.1; done; fail "never: $1"; }
state() { scontrol show job "$1" | grep -q "JobState=$2"; }
train=(quickstart.cfg device=cpu model.name=resnet20 data.image=16 train.batch=16 run.log_every=5)
submit() { sbatch --parsable --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=0 "$source/tools/slurm.sbatch" "${train[@]}" "$@"; }
newest() { readlink "runs/dnnrun-$job/checkpoints/last"; }
go_on() { # the queue would wait for two minutes; slurmd takes no job again within the second that ended it
    await "state $job PENDING"
    sleep 2
    scontrol update JobId="$job" StartTime=now
    await "state $job RUNNING"
    await "[ \$(grep -c ^resume slurm-$job.out) = $1 ]"
    last=$(newest)
    await "[ \$(newest) != $last ]"
}

for mpi in none pmi2; do
    timeout 60 srun -n 2 --mpi=$mpi dnnrun train "${train[@]}" train.max_steps=3 --out $mpi >$mpi.log 2>&1 || fail "srun --mpi=$mpi"
    grep -q "ranks   2 ranks on 1 host, started by Slurm, tcp over local" $mpi.log || fail "ranks of srun --mpi=$mpi"
done

job=$(submit run.save_every=0.5 train.max_steps=100000)
await newest
scancel --signal=USR1 "$job" # which goes to the ranks alone, as that of --signal does
go_on 2
kill -KILL "$(pgrep -f "^$build/dnnrun .*dnnrun-$job " | tail -1)"
go_on 3
grep -q "is lost: its connection ended" "slurm-$job.out" || fail "the killed rank is not named"
scancel "$job"
await "state $job CANCELLED"
await "grep -q 'Terminated) and saved' slurm-$job.out"
last=$(newest)
out=runs/dnnrun-$job
job=$(DNNRUN_OUT=$out submit train.max_steps=$((10#${last#step-} + 20)) --allow-changes)
await "state $job COMPLETED"
grep -q "resume  from $out/checkpoints/$last" "slurm-$job.out" || fail "it does not go on where it was cancelled"
job=$(submit data.train=nowhere)
await "state $job FAILED"
grep -q "ExitCode=3:0" <(scontrol show job "$job") || fail "not the ranks' exit code"
echo "all passed"
