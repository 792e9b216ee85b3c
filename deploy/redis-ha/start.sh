#!/bin/sh
# Starts a Redis or a Sentinel: start.sh redis|sentinel. The variables with defaults are for tests.
set -eu
umask 077
self=${SELF:-$POD_NAME.redis-ha.$NAMESPACE.svc}
first=${FIRST:-redis-ha-0.redis-ha.$NAMESPACE.svc}
port=${PORT:-6379}
first_port=${FIRST_PORT:-6379}
config=${CONFIG:-/etc/redis}
data=${DATA:-/data}
password=$(cat "${PASSWORD_FILE:-/etc/redis-password/password}")
case $password in
  '' | *[!0-9A-Za-z]*) echo "the password must consist of letters and digits" >&2; exit 1 ;;
esac

case $1 in
  redis)
    file=$data/redis.conf
    # Sentinel writes a new role into this file (CONFIG REWRITE). Without the file this is the first
    # start: redis-ha-0 is the primary.
    if [ -e "$file" ]; then
      primary=$(sed -n 's/^replicaof //p' "$file")
    elif [ "$self:$port" = "$first:$first_port" ]; then
      primary=
    else
      primary="$first $first_port"
    fi
    {
      cat "$config/redis.conf"
      echo "port $port"
      echo "dir $data"
      echo "requirepass $password"
      echo "masterauth $password"
      echo "replica-announce-ip $self"
      echo "replica-announce-port $port"
      if [ -n "$primary" ]; then echo "replicaof $primary"; fi
    } > "$file.new"
    mv "$file.new" "$file"
    exec redis-server "$file"
    ;;
  sentinel)
    file=$data/sentinel.conf
    # Sentinel writes its state into this file: its id, the primary, replicas and other Sentinels.
    if [ ! -e "$file" ]; then
      # A name that does not resolve yet would end the Sentinel.
      until REDISCLI_AUTH=$password redis-cli -h "$first" -p "$first_port" ping 2>&1 | grep -q PONG; do
        echo "waiting for $first:$first_port"
        sleep 1
      done
      {
        cat "$config/sentinel.conf"
        echo "port ${SENTINEL_PORT:-26379}"
        echo "sentinel announce-ip $self"
        echo "sentinel announce-port ${SENTINEL_PORT:-26379}"
        echo "sentinel monitor smart-router $first $first_port 2"
        echo "sentinel auth-pass smart-router $password"
        cat "$config/sentinel-primary.conf"
      } > "$file.new"
      mv "$file.new" "$file"
    fi
    exec redis-server "$file" --sentinel
    ;;
  *)
    echo "usage: start.sh redis|sentinel" >&2
    exit 2
    ;;
esac
