"""Lua scripts for leases: lease and epoch change atomically, in the append-only file too."""

from __future__ import annotations

from rlboost.shared.streams.bus import LONGEST_LEASE_S

_SHORTEN = f"""
local function shorten(lease)
  if redis.call('PTTL', lease) > {LONGEST_LEASE_S * 1000:.0f} then
    redis.call('PEXPIRE', lease, {LONGEST_LEASE_S * 1000:.0f})
  end
end
"""
CAP_AND_READ_LEASES = f"""{_SHORTEN}
local values = redis.call('MGET', unpack(KEYS))
for i, lease in ipairs(KEYS) do
  if values[i] then shorten(lease) end
end
return values
"""
ACQUIRE_FENCED = f"""{_SHORTEN}
local held = redis.call('GET', KEYS[1])
shorten(KEYS[1])
if held and held ~= ARGV[3] then return false end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('INCR', KEYS[2])
"""
