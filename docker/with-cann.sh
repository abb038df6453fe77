#!/bin/bash
# Runs a command with the variables of CANN, wherever the image has it, and the libraries of the host's driver.
for file in /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh; do
    if [ -f "$file" ]; then
        source "$file"
        break
    fi
done
driver=/usr/local/Ascend/driver/lib64
export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$@"
