#!/usr/bin/env bash
# One rank through NCCL, what is refused on a machine with ONE GPU, and what sums cost there. A line per check. Exit code 77:
# there is no GPU, or no mpirun.
#   tests/one_gpu.sh BUILD              some 40 s
#   tests/one_gpu.sh BUILD time [DIR]   the price of one rank and of stand-ins; plans for tools/scaling.py, into DIR; 60 s
#   DEVICE=cpu tests/one_gpu.sh BUILD   a rehearsal without a GPU
set -u
command -v mpirun >/dev/null || { echo "there is no mpirun"; exit 77; }
tool=$(realpath "$1")/dnnrun what=${2:-checks} device=${DEVICE:-cuda}
out=$(realpath -m "${3:-.}")
models=$(realpath "$(dirname "$0")/../models")
scratch=$(mktemp -d) begun=$SECONDS bad=0
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
[ "$device" = cpu ] || "$tool" plan "$models/quickstart.cfg" device=cuda >no.log 2>&1 || { head -n 1 no.log; exit 77; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
pass() { printf '%4ds  PASS  %s\n' $((SECONDS - begun)) "$1"; }
fail() { printf '%4ds  FAIL  %s\n' $((SECONDS - begun)) "$1"; bad=1; shift; tail -n 6 "$@" 2>/dev/null | sed 's/^/          /'; }
check() { local name=$1 log=$2; shift 2; if eval "$*"; then pass "$name"; else fail "$name" $log; fi; }
one() { DNR_RANK=0 DNR_WORLD_SIZE=1 "$@"; }
nccl='NCCL [0-9.]* sums on the GPU'; [ "$device" = cuda ] || nccl=ranks
T="train $models/quickstart.cfg device=$device model.name=resnet20 data.image=16 train.batch=32 train.deterministic=true run.log_every=5" S=train.max_steps=40
same() { cmp "$1/checkpoints/last/model.safetensors" "$2/checkpoints/last/model.safetensors"; }
last_loss() { python3 -c "import json,sys; print([r['loss'] for r in map(json.loads,open(sys.argv[1]+'/metrics.jsonl')) if r['event']=='train'][-1])" "$1"; }

cat >order.py <<'PY'
import json
q = next(q for q in json.load(open("plan.json"))["programs"] if q["program"] == "last")
ops = q["ops"]
at = [i for i, o in enumerate(ops) if o["op"] == "reduce" and o["layer"].startswith("bucket")]
back = [i for i, o in enumerate(ops) if o["phase"] == "backward" and o["op"] not in ("reduce", "wire.pack")]
wait = next(i for i, o in enumerate(ops) if o["op"] == "reduce.wait")
print("          sums at ops", at, "of", len(ops), "backward", back[0], "to", back[-1], "wait at", wait, {ops[i]["implementation"] for i in at})
assert len(at) == len(q["buckets"]) == 5 and all(ops[i]["lane"] == "comm" for i in at)
assert [b["after"] + 1 for b in q["buckets"]] == at and back[-1] < wait and at[0] < back[0] + (back[-1] - back[0]) / 3
PY
if [ "$what" = checks ]; then
    timeout 60 "$tool" $T $S --out alone >alone.log 2>&1; rc=$?
    check "alone trains ($device)" alone.log "[ $rc = 0 ]"
    one timeout 60 "$tool" $T $S --out w1 >w1.log 2>&1; rc=$?
    check "DNR_WORLD_SIZE=1 through NCCL: rc 0, says NCCL" w1.log "[ $rc = 0 ] && grep -q 'ranks   1 rank on 1 host, started by DNR_RANK' w1.log && grep -q '$nccl' w1.log"
    grep '^ranks' w1.log | sed 's/^/          /'
    check "  the same bits as alone" w1.log "same alone w1"
    timeout 60 mpirun -n 1 "$tool" $T $S --out m1 >m1.log 2>&1; rc=$?
    check "mpirun -n 1: rc 0, says Open MPI and NCCL, the same bits" m1.log "[ $rc = 0 ] && grep -q 'started by Open MPI' m1.log && grep -q '$nccl' m1.log && same alone m1"
    if [ -e "$(dirname "$tool")/dnnrun-mpi.so" ]; then
        timeout 60 mpirun -n 1 "$tool" $T $S dist.transport=mpi --out mm1 >mm1.log 2>&1; rc=$?
        check "mpirun -n 1, dist.transport=mpi beside NCCL: the same bits" mm1.log "[ $rc = 0 ] && grep -q 'started by Open MPI, mpi' mm1.log && same alone mm1"
    fi
    one timeout 60 "$tool" $T $S model.sync_bn=true --out sync >sync.log 2>&1; rc=$?
    check "model.sync_bn through NCCL (sums on the compute lane): loss near alone's" sync.log "[ $rc = 0 ] && python3 -c \"a,b=$(last_loss alone),$(last_loss sync); assert abs(a/b-1)<0.2, (a,b)\""
    p=fp16; [ "$device" = cuda ] || p=fp32; r=fp16; [ "$device" = cuda ] || r=bf16
    one timeout 60 "$tool" $T train.precision=$p dist.reduce_type=$r train.accumulate=2 train.max_steps=20 --out half >half.log 2>&1; rc=$?
    check "dist.reduce_type=$r with accumulation" half.log "[ $rc = 0 ] && python3 -c \"assert $(last_loss half) < 3\""
    timeout 60 "$tool" eval alone device=$device --json >e0.json 2>e0.log; timeout 60 mpirun -n 1 "$tool" eval alone device=$device --json >e1.json 2>e1.log
    check "eval under mpirun -n 1 counts the same" "e0.log e1.log" "python3 -c \"import json; a,b=json.load(open('e0.json')),json.load(open('e1.json')); assert a['images']==b['images']>0 and a['correct1']==b['correct1'] and a['correct5']==b['correct5']\" 2>/dev/null"
        timeout 60 mpirun -n 1 "$tool" $T train.max_steps=1700 run.save_every=0.5 --out usr >usr.log 2>&1 & m=$!
    for _ in $(seq 200); do [ -e usr/checkpoints/last ] && break; sleep 0.1; done
    kill -USR1 "$(pgrep -P $m mpirun || echo $m)"; wait $m; rc=$?
    check "SIGUSR1 to mpirun -n 1 saves and gives 75" usr.log "[ $rc = 75 ] && grep -q 'stopped after step' usr.log"
    if [ "$device" = cuda ]; then
        t=$SECONDS; timeout 60 mpirun --oversubscribe -n 2 "$tool" $T $S --out two >two.log 2>&1; rc=$?
        check "mpirun -n 2 on one GPU is refused with 5, by PCI address, within 20 s ($((SECONDS - t)) s)" two.log "[ $rc = 5 ] && grep -q 'ranks 0 and 1 both use the GPU at [0-9a-f]*:' two.log && [ $((SECONDS - t)) -le 20 ] && [ ! -e two ]"
        grep -m 1 'both use' two.log | sed 's/^/          /'
        export DNR_WORLD_SIZE=2 DNR_MASTER=127.0.0.1:29561
        DNR_RANK=1 timeout 60 "$tool" ${T/device=cuda/device=cpu} $S --out mix >mix1.log 2>&1 & m=$!
        DNR_RANK=0 timeout 60 "$tool" $T $S --out mix >mix0.log 2>&1; rc=$?; wait $m; rc1=$?
        check "one rank on cuda, one on cpu: both end with 5 and say so" "mix0.log mix1.log" "[ $rc = 5 ] && [ $rc1 = 5 ] && grep -q 'computes on cpu' mix0.log"
        DNR_RANK=1 timeout 60 "$tool" ${T/device=cuda/device=cuda:7} $S --out none >none1.log 2>&1 & m=$!
        DNR_RANK=0 timeout 60 "$tool" $T $S --out none >none0.log 2>&1; rc=$?; wait $m; rc1=$?
        check "rank 1 asks for a GPU that is not there: 6, and rank 0 quotes it with 5" "none0.log none1.log" "[ $rc = 5 ] && [ $rc1 = 6 ] && grep -q 'rank 1 on .*ended with an error' none0.log"
        unset DNR_WORLD_SIZE DNR_MASTER
    fi
    one timeout 60 "$tool" plan $models/resnet50.cfg device=$device data.train=synthetic data.val= $([ "$device" = cuda ] || echo train.batch=2 cudnn.benchmark=false) --json >plan.json 2>plan.log; rc=$?
    check "plan with one rank: each bucket's sum on the comm lane, behind its last gradient, the first long before backward ends" plan.log "[ $rc = 0 ] && python3 order.py"
    timeout 60 mpirun -n 1 "$tool" bench allreduce device=$device --json >ar.json 2>ar.log; rc=$?
    check "bench allreduce, mpirun -n 1: 4 B to 1 GiB, each sum right" "ar.json ar.log" "[ $rc = 0 ] && python3 -c \"import json; j=json.load(open('ar.json')); assert j['ranks']==1 and [s['bytes'] for s in j['sizes']]==[4**k for k in range(1,16)]\""
    one timeout 60 "$tool" bench train $models/quickstart.cfg device=$device --runs 30 dist.standin=8:340:20 >st.log 2>&1; rc=$?
    check "dist.standin runs" st.log "[ $rc = 0 ]"
    one timeout 60 "$tool" bench train $models/quickstart.cfg device=$device dist.standin=8:340 >st2.log 2>&1; rc=$?
    check "dist.standin=8:340 is refused with 2" st2.log "[ $rc = 2 ] && grep -q 'for example 8:340:20' st2.log"
    DNR_RANK=0 DNR_WORLD_SIZE=2 DNR_MASTER=127.0.0.1:29562 timeout 30 "$tool" bench train $models/quickstart.cfg device=$device dist.timeout=3 >ms.log 2>&1; rc=$?
    check "a rank that never comes: 5 within the timeout" ms.log "[ $rc = 5 ] && grep -q 'missing 1' ms.log"
else
    mkdir -p "$out"
    B="$models/resnet50.cfg device=$device data.train=synthetic data.val= train.batch=${BATCH:-256}"
    ms() { python3 -c "import json,sys; print('%.3f' % json.load(open(sys.argv[1]))['ms_per_run'])" "$1" 2>/dev/null || echo "?"; }
    bench() { n=$1; shift; timeout 100 "$@" --json --runs ${RUNS:-80} >$n.json 2>$n.log || fail "$n" $n.log; printf '%4ds  %-28s %s ms a step\n' $((SECONDS - begun)) "$n" "$(ms $n.json)"; }
    bench warm "$tool" bench train $B # times the engines
    for k in 1 2 3; do
        bench alone$k "$tool" bench train $B
        bench nccl1-$k env DNR_RANK=0 DNR_WORLD_SIZE=1 "$tool" bench train $B
    done
    check "world size 1 through NCCL costs at most 1 % (best of 3)" /dev/null "python3 -c \"
import json
f=lambda n: min(json.load(open(f'{n}{k}.json'))['ms_per_run'] for k in (1,2,3))
a,b=f('alone'),f('nccl1-'); print('          alone %.3f, NCCL %.3f ms: %+.2f %%' % (a,b,100*(b/a-1))); assert b<=1.01*a\""
    bench standin-8 env DNR_RANK=0 DNR_WORLD_SIZE=1 "$tool" bench train $B dist.standin=8:340:20
    bench standin-512 env DNR_RANK=0 DNR_WORLD_SIZE=1 "$tool" bench train $B dist.standin=512:24:100
    bench fp16-1 env DNR_RANK=0 DNR_WORLD_SIZE=1 "$tool" bench train $B $([ "$device" = cuda ] && echo dist.reduce_type=fp16)
    for b in 256 64; do # inputs of tools/scaling.py
        timeout 100 "$tool" plan $models/resnet50.cfg device=$device data.train=synthetic data.val= train.batch=$b --measure --json >"$out/plan$b.json" 2>p.log; rc=$?
        timeout 100 "$tool" bench train $models/resnet50.cfg device=$device data.train=synthetic data.val= train.batch=$b --json --runs ${RUNS:-80} >"$out/bench$b.json" 2>p.log; rc=$((rc + $?))
        check "plan$b.json, bench$b.json in $out" p.log "[ $rc = 0 ]"
    done
    echo "        then: tools/scaling.py $out/plan256.json $out/plan64.json --step-ms $(ms "$out/bench256.json"),$(ms "$out/bench64.json") --table"
fi
exit $bad
