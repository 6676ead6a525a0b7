"""What runs inside Redis or Valkey. Every key a script touches is declared and shares one hash tag, so Cluster accepts it.

Directory scripts get two hashes of one bucket: KEYS[1] key → place, KEYS[2] key → its pins (msgpack map of pin id → end in ms
of the store's clock). Pins that ended count as gone wherever they are met; the whole pin hash expires with its last pin.
"""

_PINS = """
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function pins(key)
  local packed = redis.call('HGET', KEYS[2], key)
  local live, any = {}, false
  if packed then
    local t = now()
    for id, ends in pairs(cmsgpack.unpack(packed)) do
      if ends > t then live[id] = ends; any = true end
    end
    if not any then redis.call('HDEL', KEYS[2], key) end
  end
  return live, any
end
local function set_pins(key, live)
  if next(live) == nil then redis.call('HDEL', KEYS[2], key)
  else redis.call('HSET', KEYS[2], key, cmsgpack.pack(live)) end
end
"""

#: ARGV: key, place, … → for each: '' if it was absent and is now ours, else the place that was there.
REGISTER = """
local out = {}
for i = 1, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i])
  if old then out[#out + 1] = old
  else redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]); out[#out + 1] = '' end
end
return out
"""

#: ARGV: key, expected place, new place, 'stale' (its grant has ended: pins do not count) or 'live', … → 1 replaced, 0 not.
REPLACE = (
    _PINS
    + """
local out = {}
for i = 1, #ARGV, 4 do
  local done = 0
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    local _, pinned = pins(ARGV[i])
    if ARGV[i + 3] == 'stale' or not pinned then
      redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
      done = 1
    end
  end
  out[#out + 1] = done
end
return out
"""
)

#: ARGV: key, expected place, … → 1 deleted, 2 pinned, 0 another place is there (or none).
DELETE = (
    _PINS
    + """
local out = {}
for i = 1, #ARGV, 2 do
  local result = 0
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    local _, pinned = pins(ARGV[i])
    if pinned then result = 2
    else redis.call('HDEL', KEYS[1], ARGV[i]); result = 1 end
  end
  out[#out + 1] = result
end
return out
"""
)

#: ARGV: pin id, ttl in ms, key, … → for each: its place, or '' (not pinned).
PIN = (
    _PINS
    + """
local out, ends = {}, now() + ARGV[2]
for i = 3, #ARGV do
  local place = redis.call('HGET', KEYS[1], ARGV[i])
  if place then
    local live = pins(ARGV[i])
    live[ARGV[1]] = ends
    set_pins(ARGV[i], live)
  end
  out[#out + 1] = place or ''
end
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
return out
"""
)

#: ARGV: pin id, key, … → how many were pinned by it.
UNPIN = (
    _PINS
    + """
local n = 0
for i = 2, #ARGV do
  local live = pins(ARGV[i])
  if live[ARGV[1]] then
    n = n + 1
    live[ARGV[1]] = nil
    set_pins(ARGV[i], live)
  end
end
return n
"""
)

#: KEYS: version, state, beats, alive. ARGV: expected version, new version, state, msgpack map
#: ``{check: {member: count}, add: [member], remove: [member]}``. Stores the state if nobody stored another one and no member of
#: ``check`` has sent a heartbeat since; 1 stored, 0 not.
STORE_STATE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
local change = cmsgpack.unpack(ARGV[4])
for member, count in pairs(change.check) do
  if tonumber(redis.call('HGET', KEYS[3], member) or '0') ~= count then return 0 end
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
for member in pairs(change.check) do redis.call('HDEL', KEYS[3], member) end
for _, member in ipairs(change.remove) do redis.call('SREM', KEYS[4], member) end
for _, member in ipairs(change.add) do
  redis.call('SADD', KEYS[4], member)
  redis.call('HINCRBY', KEYS[3], member, 1)
end
return 1
"""

#: KEYS: beats, alive. ARGV: member → 1 counted, 0 it is not alive.
HEARTBEAT = """
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
return 1
"""
