"""What a shared store runs: Lua, so that each operation is atomic for all gateways.

An account has these keys; ``{account}`` is a hash tag, so that a cluster keeps them together:

    {account}:starts     sorted set   lease id -> time, of the requests in the last 60 s
    {account}:leases     sorted set   lease id -> time when it expires
    {account}:amounts    hash         lease id -> "input:output" that it has reserved
    {account}:reserved   hash         in, out: sums of the amounts
    {account}:ended      sorted set   lease id -> time, so that a settlement told twice counts once
    {account}:used:...   hash         requests, in, out of one window of a period

Times are the store's own. KEYS are the first five, then the windows of the limited periods; ARGV are given with each
script. Every limit is -1 where there is none.
"""

PRELUDE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local starts, leases, amounts, reserved, ended = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local keep_s = 86400

local function release(id)
  redis.call('ZREM', leases, id)
  local amount = redis.call('HGET', amounts, id)
  if amount then
    local input, output = string.match(amount, '(%d+):(%d+)')
    redis.call('HINCRBY', reserved, 'in', 0 - tonumber(input))
    redis.call('HINCRBY', reserved, 'out', 0 - tonumber(output))
    redis.call('HDEL', amounts, id)
  end
end

local function hold(id, ttl, input, output)
  redis.call('ZADD', leases, now + ttl, id)
  if input > 0 or output > 0 then
    redis.call('HSET', amounts, id, string.format('%d:%d', input, output))
    redis.call('HINCRBY', reserved, 'in', input)
    redis.call('HINCRBY', reserved, 'out', output)
  end
  for _, key in ipairs({leases, amounts, reserved}) do redis.call('EXPIRE', key, keep_s) end
end

local function expire(rate_window)
  redis.call('ZREMRANGEBYSCORE', starts, '-inf', now - rate_window)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do release(id) end
end

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or '0')
end

-- what refuses: kind, index of the window from 1 or 0, name, limit, used, asked, seconds or -1 for the window's end
local function refuse_tokens(first, count, input, output)
  local rin, rout = number(reserved, 'in'), number(reserved, 'out')
  for i = 1, count do
    local key, at = KEYS[5 + i], first + (i - 1) * 5
    local uin, uout = number(key, 'in') + rin, number(key, 'out') + rout
    local checks = {
      {'tokens', tonumber(ARGV[at + 3]), uin + uout, input},
      {'input tokens', tonumber(ARGV[at + 1]), uin, input},
      {'output tokens', tonumber(ARGV[at + 2]), uout, output},
    }
    for _, check in ipairs(checks) do
      if check[2] >= 0 and check[3] + check[4] > check[2] then
        return {'tokens', i, check[1], check[2], check[3], check[4], '-1'}
      end
    end
  end
  return nil
end
"""

ADMIT = (
    PRELUDE
    + """
-- ARGV: id, ttl, rate window, requests per minute, parallel, number of periods, then five for each period:
-- requests, input, output, tokens, seconds to keep the window
local id, ttl, rate_window = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local per_minute, parallel, count = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
expire(rate_window)
if per_minute >= 0 then
  local used = redis.call('ZCARD', starts)
  if used >= per_minute then
    local first = redis.call('ZRANGE', starts, used - per_minute, used - per_minute, 'WITHSCORES')
    return {'requests', 0, 'requests per minute', per_minute, used, 1, tostring(first[2] + rate_window - now)}
  end
end
if parallel >= 0 then
  local used = redis.call('ZCARD', leases)
  if used >= parallel then return {'requests', 0, 'parallel requests', parallel, used, 1, '1'} end
end
for i = 1, count do
  local limit, used = tonumber(ARGV[7 + (i - 1) * 5]), number(KEYS[5 + i], 'requests')
  if limit >= 0 and used >= limit then return {'requests', i, 'requests', limit, used, 1, '-1'} end
end
local refusal = refuse_tokens(7, count, 1, 1)
if refusal then return refusal end
if per_minute >= 0 then
  redis.call('ZADD', starts, now, id)
  redis.call('EXPIRE', starts, math.ceil(rate_window) + 1)
end
for i = 1, count do
  redis.call('HINCRBY', KEYS[5 + i], 'requests', 1)
  redis.call('EXPIRE', KEYS[5 + i], ARGV[7 + (i - 1) * 5 + 4])
end
hold(id, ttl, 0, 0)
return {}
"""
)

RESERVE = (
    PRELUDE
    + """
-- ARGV: id, ttl, rate window, input, output, number of periods, then five for each period as above
local id, ttl, rate_window = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local input, output, count = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
expire(rate_window)
release(id)
local refusal = refuse_tokens(7, count, input, math.min(1, output))
if refusal then
  hold(id, ttl, 0, 0)
  return refusal
end
local rin, rout = number(reserved, 'in'), number(reserved, 'out')
for i = 1, count do
  local key, at = KEYS[5 + i], 7 + (i - 1) * 5
  local uin, uout = number(key, 'in') + rin, number(key, 'out') + rout
  local most_output, most = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if most >= 0 then output = math.min(output, most - uin - uout - input) end
  if most_output >= 0 then output = math.min(output, most_output - uout) end
end
hold(id, ttl, input, math.max(0, output))
return {}
"""
)

SETTLE = (
    PRELUDE
    + """
-- ARGV: id, input, output, number of periods, then the seconds to keep each window
local id, input, output, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', ended, '-inf', now - 3600)
if redis.call('ZADD', ended, 'NX', now, id) == 0 then return 0 end
redis.call('EXPIRE', ended, 3600)
release(id)
for i = 1, count do
  redis.call('HINCRBY', KEYS[5 + i], 'in', input)
  redis.call('HINCRBY', KEYS[5 + i], 'out', output)
  redis.call('EXPIRE', KEYS[5 + i], ARGV[4 + i])
end
return 1
"""
)

BALANCE = (
    PRELUDE
    + """
-- ARGV: rate window, number of periods
local rate_window, count = tonumber(ARGV[1]), tonumber(ARGV[2])
expire(rate_window)
local first = redis.call('ZRANGE', starts, 0, 0, 'WITHSCORES')
local reset = first[2] and first[2] + rate_window - now or 0
local found = {redis.call('ZCARD', starts), tostring(reset), redis.call('ZCARD', leases)}
local rin, rout = number(reserved, 'in'), number(reserved, 'out')
for i = 1, count do
  local key = KEYS[5 + i]
  table.insert(found, number(key, 'requests'))
  table.insert(found, number(key, 'in') + rin)
  table.insert(found, number(key, 'out') + rout)
end
return found
"""
)

RENEW = (
    PRELUDE
    + """
-- ARGV: ttl, then lease ids; one that has been settled stays away
for i = 2, #ARGV do redis.call('ZADD', leases, 'XX', now + tonumber(ARGV[1]), ARGV[i]) end
redis.call('EXPIRE', leases, keep_s)
return 0
"""
)
