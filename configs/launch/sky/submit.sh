#!/bin/bash
# Starts the host of the run {{ run_id }} and its {{ peers }} peers with SkyPilot. The machine of the host goes half an hour
# after the run has ended. To end it earlier: sky jobs cancel -n {{ name }}-peer-0 (and so on), then sky down {{ host_name }}
set -eu
host={{ host_name }}
out={{ out }}

sky launch --yes --cluster "$host" --idle-minutes-to-autostop 30 --down "$out/host.yaml"
ip=$(sky status --ip "$host")
sky exec --detach-run "$host" "$out/host.yaml" --env "HOST_IP=$ip"
for peer in $(seq 0 {{ peers - 1 }}); do
  sky jobs launch --yes --detach-run --name {{ name }}-peer-"$peer" "$out/peer.yaml" --env "HOST_IP=$ip" --env "PEER=$peer"
done
