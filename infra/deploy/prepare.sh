#!/bin/sh
# Fills infra/deploy/.env, which docker compose reads: a password for each user, made once, and the digest of each image, asked of
# its registry where it is not there yet. Remove a line of the file to have it made anew.
set -eu
umask 077
cd "$(dirname "$0")"
touch .env
for name in MASTER TRAIN PROCESS EXPLORE SERVE OPERATOR TLS MINIO_ADMIN GRAFANA; do
  grep -q "^${name}_PASSWORD=" .env || echo "${name}_PASSWORD=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >> .env
done
pin() { # NAME IMAGE
  grep -q "^$1_DIGEST=sha256:" .env && return
  digest=$(docker buildx imagetools inspect "$2" --format '{{.Manifest.Digest}}')
  case "$digest" in sha256:*) echo "$1_DIGEST=$digest" >> .env ;; *) echo "prepare: no digest of $2: got \"$digest\"" >&2; exit 1 ;; esac
}
sed -n 's/.*image: \([^ @]*\)@${\([A-Z]*\)_DIGEST.*/\2 \1/p' compose.yml | sort -u | while read -r name image; do pin "$name" "$image"; done
pin PYTHON "$(sed -n 's/^FROM \([^ @$]*\)@.* AS build$/\1/p' Dockerfile)"
