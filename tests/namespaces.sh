#!/usr/bin/env bash
# Two emulated hosts (network namespaces with addresses and names of their own) train together, their ranks started by hand
# and by mpirun, over TCP and MPI; when the link between them is cut, both sides name each other and end with 5. Exit code
# 77: this needs root and ip.
#   tests/namespaces.sh BUILD
set -euo pipefail
tool=$(realpath "$1")/dnnrun
a=dnnrun-a-$$ b=dnnrun-b-$$ scratch=$(mktemp -d)
clean() { { ip netns pids $a; ip netns pids $b; } | xargs -r kill -KILL; ip netns del $a; ip netns del $b; rm -rf "$scratch"; }
trap 'clean 2>/dev/null || true' EXIT
command -v ip >/dev/null && ip netns add $a 2>/dev/null && ip netns add $b && unshare --uts true ||
    { echo "no network namespaces here"; exit 77; }
ip link add va$$ netns $a type veth peer name vb$$ netns $b
ip -n $a addr add 10.77.0.1/24 dev va$$
ip -n $b addr add 10.77.0.2/24 dev vb$$
for n in $a $b; do ip -n $n link set lo up; done
ip -n $a link set va$$ up
ip -n $b link set vb$$ up
cd "$scratch"
export DNR_WORLD_SIZE=2 DNR_MASTER=10.77.0.1:29555 OMP_NUM_THREADS=1
start() { # NAMESPACE RANK
    DNR_RANK=$2 ip netns exec "$1" unshare --uts sh -c "hostname host$2; exec '$tool' train quickstart.cfg device=cpu \
        model.name=resnet20 data.image=16 train.batch=16 run.save_every=0.5 dist.timeout=4 --out run" >log$2 2>&1 &
}
start $a 0; one=$!
start $b 1; two=$!
for _ in $(seq 600); do [ -e run/checkpoints/last ] && break; sleep 0.05; done
ip -n $a link set va$$ down
for k in 0 1; do
    code=0
    if [ $k = 0 ]; then wait $one || code=$?; else wait $two || code=$?; fi
    [ $code = 5 ] || { echo "rank $k ended with $code"; cat log0 log1; exit 1; }
    grep -q "rank $((1 - k)) on host$((1 - k)) .* is lost: " log$k || { echo "rank $k names nobody"; cat log$k; exit 1; }
done
grep -q "ranks   2 ranks on 2 hosts, started by DNR_RANK, tcp over va$$ 10.77.0.1" log0 || { cat log0; exit 1; }
env -u DNR_WORLD_SIZE -u DNR_MASTER "$tool" eval run >/dev/null # the last checkpoint is whole

# mpirun on the first host, which reaches the second as it would by ssh.
command -v mpirun >/dev/null || { echo "both ended with 5; there is no mpirun"; exit 0; }
ip -n $a link set va$$ up
is_up() { ip -n $a -br link show va$$ | grep -q ' UP ' && ip -n $b -br link show vb$$ | grep -q ' UP '; }
for _ in $(seq 100); do is_up && break; sleep 0.1; done # the kernel takes a second to notice
cat >agent <<SH
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c "hostname host1; exec \$*"
SH
chmod +x agent
printf '10.77.0.%d slots=1\n' 1 2 >hosts
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0 # Open MPI itself leaks
spread() {
    ip netns exec $a unshare --uts sh -c 'hostname host0; exec "$@"' mpirun timeout 60 mpirun --mca plm_rsh_agent "$PWD/agent" --hostfile hosts \
        -n 2 -x DNR_MASTER -x OMP_NUM_THREADS -x ASAN_OPTIONS "$tool" train quickstart.cfg device=cpu model.name=resnet20 data.image=16 train.batch=16 train.deterministic=true "$@"
}
unset DNR_WORLD_SIZE
transports=tcp
[ ! -e "$(dirname "$tool")/dnnrun-mpi.so" ] || transports="tcp mpi"
for t in $transports; do
    spread train.max_steps=5 dist.transport=$t --out $t >$t.log 2>&1 || { cat $t.log; exit 1; }
    grep -q "ranks   2 ranks on 2 hosts, started by Open MPI, $t over va$$ 10.77.0.1" $t.log || { cat $t.log; exit 1; }
done
[ "$transports" = tcp ] || cmp tcp/checkpoints/last/model.safetensors mpi/checkpoints/last/model.safetensors
spread run.save_every=0.5 dist.timeout=4 --out torn >torn.log 2>&1 &
for _ in $(seq 600); do [ -e torn/checkpoints/last ] && break; sleep 0.05; done
ranks() { pgrep -f "^$tool .*--out torn"; }
[ "$(ranks | wc -l)" = 2 ] || { echo "not two ranks"; cat torn.log; exit 1; }
ip -n $a link set va$$ down
for _ in $(seq 70); do ranks >/dev/null || break; sleep 0.1; done # mpirun itself goes on to wait for its daemon there
! ranks || { echo "ranks outlive their link by 7 s"; cat torn.log; exit 1; }
grep -q "rank 1 on host1 .* is lost: " torn.log || { cat torn.log; exit 1; }
echo "all ended with 5"
