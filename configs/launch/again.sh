# sh again.sh COMMAND...: runs a peer or a host, and fails if it had to leave before the run was over.
#
# A peer that is told to leave (SIGTERM) does so cleanly, and exits with 0, as one does that has trained to the end. What
# started it would not start it again. So this ends with 143, as if the signal itself had ended it.
told=
trap 'told=143; kill -TERM "$peer" 2>/dev/null' TERM

"$@" &
peer=$!
wait "$peer"
code=$?
while kill -0 "$peer" 2>/dev/null; do # the signal ended `wait`, and not the peer
  wait "$peer"
  code=$?
done
exit "${told:-$code}"
