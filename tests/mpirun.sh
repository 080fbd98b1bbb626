#!/usr/bin/env bash
# Under Open MPI's mpirun, over TCP and MPI: the tool trains and evaluates on 1, 2 and 4 ranks, and trainers on ref do as one;
# a killed rank is named before the launcher ends the others, who end with 5 where it does not; SIGUSR1 saves and ends with
# 75. Exit code 77: there is no mpirun here.
#   tests/mpirun.sh BUILD
set -euo pipefail
command -v mpirun >/dev/null || { echo "there is no mpirun"; exit 77; }
tool=$(realpath "$1")/dnnrun
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launch=(mpirun --oversubscribe)
train=("$tool" train quickstart.cfg device=cpu model.name=resnet20 data.image=16 train.deterministic=true run.log_every=1)
fail() { echo "$1"; cat ./*.log; exit 1; }

for n in 1 2 4; do
    "${launch[@]}" -n $n "${train[@]}" train.batch=$((32 / n)) train.max_steps=20 --out run$n >run$n.log 2>&1 || fail "$n ranks"
    grep -q "ranks   $n rank.* on 1 host, started by Open MPI" run$n.log || fail "$n ranks are not said"
    "${launch[@]}" -n $n "$tool" eval run4 --json >eval$n.json 2>/dev/null || [ $n -lt 4 ] || fail "eval on $n ranks"
done
"$tool" eval run4 --json >alone.json
python3 - <<'PY'
import json
a, b = (json.load(open(f)) for f in ("alone.json", "eval4.json"))
assert a["images"] == b["images"] and a["correct1"] == b["correct1"], (a, b)
PY

# Trainers on ref in fp64, with sync_bn and without, against one; sums of every type. Over MPI itself, where this build has it.
transports=tcp
[ ! -e "$(dirname "$tool")/dnnrun-mpi.so" ] || transports="tcp mpi"
cases() { # RANKS PROGRAM CASE [NAME=VALUE]
    for t in $transports; do
        env OMP_NUM_THREADS=1 DNR_TEST_CASE=$3 DNR_TEST_TRANSPORT=$t "${@:4}" "${launch[@]}" -n "$1" "$(dirname "$tool")/tests/$2" >case.log 2>&1 || fail "$3 on $1 ranks over $t"
        grep -q "PASSED" case.log || fail "$3 did not run"
    done
}
for n in 1 2 4; do cases $n test_dist case_equals_large_batch; done
cases 4 test_dist case_equals_large_batch GROUP=2
cases 4 test_dist case_equals_accumulation
cases 4 test_dist case_rounds_gradients REDUCE=2
cases 3 test_comm case_collectives
cases 6 test_comm case_groups SIZE=3

if [ "$transports" != tcp ]; then
    "${launch[@]}" -n 4 "${train[@]}" train.batch=8 train.max_steps=20 dist.transport=mpi --out mpi4 >mpi4.log 2>&1 || fail "MPI"
    grep -q "started by Open MPI, mpi" mpi4.log || fail "MPI is not said"
    "${launch[@]}" -n 4 "${train[@]}" train.batch=8 train.max_steps=4 dist.transport=mpi dist.reduce_type=bf16 --out mpi16 >mpi16.log 2>&1 || fail "MPI in bf16"
    for t in tcp mpi; do
        "${launch[@]}" -n 4 "${train[@]}" train.batch=8 train.max_steps=3 model.sync_bn=true model.sync_bn_group=2 dist.transport=$t --out sync-$t >sync-$t.log 2>&1 || fail "sync_bn in groups over $t"
    done
    "${launch[@]}" -n 2 "$tool" bench allreduce device=cpu dist.transport=mpi --most 4 >bench.log 2>&1 || fail "MPI's sums"
    python3 - <<'PY'
import json
def losses(run):
    return [r["loss"] for r in map(json.loads, open(f"{run}/metrics.jsonl")) if r["event"] == "train"]
a, b, c = losses("run4")[:4], losses("mpi4")[:4], losses("mpi16")[:4]  # later on, rounding in another order is amplified
print(a, b, c)
s, t = losses("sync-tcp"), losses("sync-mpi")
print(s, t)
assert len(s) == 3 and s[1:] != a[1:3] and all(abs(x / y - 1) < 1e-4 for x, y in zip(s, t))
assert len(a) == 4 and all(abs(x / y - 1) < 1e-3 for x, y in zip(a, b))
assert c[0] == b[0] and c != b and all(abs(x / y - 1) < 1e-2 for x, y in zip(a, c))
PY
fi

# The victim is one of the ranks, which mpirun's children are.
wait_for() { for _ in $(seq 600); do [ -e "$1" ] && return; sleep 0.05; done; fail "$1 does not appear"; }
"${launch[@]}" -n 3 "${train[@]}" train.batch=8 run.save_every=0.5 --out killed >killed.log 2>&1 &
mpi=$!
wait_for killed/checkpoints/last
victim=$(pgrep -P $mpi -f "$tool" | tail -1)
kill -KILL "$victim"
code=0; wait $mpi || code=$?
[ $code -ne 0 ] || fail "mpirun succeeds although a rank was killed"
grep -q "(process $victim) is lost: its connection ended; it was at: " killed.log || fail "the killed rank is not named"
"${launch[@]}" -n 3 "${train[@]}" train.batch=8 train.max_steps=40 --allow-changes --out killed --resume auto >again.log 2>&1 || fail "resume"

# A launcher that lets the others be: each of them ends with 5 by itself.
cat >noting <<'SH'
#!/bin/sh
"$@"
code=$?
echo $code >code.$OMPI_COMM_WORLD_RANK
exit $code
SH
chmod +x noting
"${launch[@]}" --enable-recovery -n 3 ./noting "${train[@]}" train.batch=8 run.save_every=0.5 --out noted >noted.log 2>&1 &
mpi=$!
wait_for noted/checkpoints/last
victim=$(pgrep -f "^$tool.*--out noted" | tail -1)
kill -KILL "$victim"
wait $mpi || true
grep -q "(process $victim) is lost: its connection ended; it was at: " noted.log || fail "the killed rank is not named"
[ "$(sort -n code.0 code.1 code.2 | tr '\n' ' ')" = "5 5 137 " ] || { cat code.*; fail "not two codes of 5 beside one of 137"; }

"${launch[@]}" -n 2 "${train[@]}" train.batch=16 run.save_every=0.5 --out stopped >stopped.log 2>&1 &
mpi=$!
wait_for stopped/checkpoints/last
kill -USR1 $mpi
code=0; wait $mpi || code=$?
[ $code -eq 75 ] || fail "SIGUSR1 to mpirun gives $code, not 75"
grep -q "stopped after step" stopped.log || fail "it does not say that it stopped"
echo "all passed"
