#!/bin/bash
# Compares DiLoCo with synchronous training over a slow link: two network namespaces, one worker and one core each, joined by
# a link of RATE. Synchronous training runs over the same link without a limit, because its loss is the same at any speed; of
# SYNC_STEPS more steps it measures the pace over the slow link. Bytes are those that worker 0's interface sends, with TCP
# and TLS. Needs Linux, root, iproute2 and taskset.
# usage: slow_link.sh RATE PROGRAM [flags of the program]     e.g. slow_link.sh 10mbit ./diloco -text shakespeare.txt
set -eu
rate=$1 program=$2
shift 2
a=dl$$a b=dl$$b
down() {
  ip netns del $a 2>/dev/null || true
  ip netns del $b 2>/dev/null || true
}
trap down EXIT
for n in $a $b; do
  ip netns add $n
  ip netns exec $n ip link set lo up
done
ip link add v$$a netns $a type veth peer name v$$b netns $b
i=1
for n in a b; do
  ip netns exec dl$$$n ip addr add 10.77.0.$i/24 dev v$$$n
  ip netns exec dl$$$n ip link set v$$$n up
  i=$((i + 1))
done
limit() { # RATE, or nothing for no limit
  for n in a b; do
    ip netns exec dl$$$n tc qdisc del dev v$$$n root 2>/dev/null || true
    [ $# = 0 ] || ip netns exec dl$$$n tc qdisc add dev v$$$n root tbf rate "$1" burst 64kb latency 100ms
  done
}
sent() { ip netns exec $a cat /sys/class/net/v$$a/statistics/tx_bytes; }
run() { # LINK [flags]
  local link=$1 before n r
  shift
  before=$(sent)
  for r in 1 0; do
    n=$([ $r = 0 ] && echo $a || echo $b)
    ip netns exec "$n" env LOCKSTEP_SECRET="$(printf 'ab%.0s' $(seq 32))" \
      TF_CONFIG="{\"cluster\":{\"worker\":[\"10.77.0.1:29400\",\"10.77.0.2:29400\"]},\"task\":{\"type\":\"worker\",\"index\":$r}}" \
      taskset -c $r "$program" "$@" 2>/dev/null | sed "s/^/link=$link /" &
  done
  wait
  echo "link=$link sent=$(($(sent) - before))"
}
limit
run unlimited "$@" -inner-steps 0 -compress none
limit "$rate"
run "$rate" "$@"
run "$rate" "$@" -inner-steps 0 -compress none -steps "${SYNC_STEPS:-20}"
