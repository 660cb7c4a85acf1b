#!/bin/bash
# Checks the examples of this folder by their own tools: bash docs/deploy/check.sh
# CI installs Debian's packages prometheus (for promtool), shellcheck and systemd (for systemd-analyze).
set -euo pipefail
cd "$(dirname "$0")"

units=$(mktemp -d)
trap 'rm -rf "$units"' EXIT

promtool check config prometheus.yaml
promtool test rules alerts_test.yaml
shellcheck slurm.sh check.sh

# Each query of the dashboard, as a rule, so that promtool parses it.
python3 - > "$units/queries.json" << 'END'
import json
panels = json.load(open("grafana-dashboard.json"))["panels"]
queries = [target["expr"].replace("$__rate_interval", "1m") for panel in panels for target in panel["targets"]]
rules = [{"record": f"dashboard:{number}", "expr": query} for number, query in enumerate(queries)]
print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
END
promtool check rules "$units/queries.json"

for unit in hetero-pp-*@.service; do # systemd-analyze wants the program of ExecStart to be there
    sed -E 's#^(ExecStart=)\S*/hetero-pp join#\1/bin/true#' "$unit" > "$units/${unit/@/@hosts}"
done
complaints=$( # it exits with 0 after most complaints
    systemd-analyze verify --man=no "$units"/hetero-pp-serve@hosts.service 2>&1
    XDG_RUNTIME_DIR=$units systemd-analyze verify --man=no --user "$units"/hetero-pp-join@hosts.service 2>&1
) || true
if [ -n "$complaints" ]; then
    echo "$complaints"
    exit 1
fi
