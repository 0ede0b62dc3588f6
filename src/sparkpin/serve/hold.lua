-- Lets a request wait while the server does not listen, by the word that process 1 of it has left
-- (releases/inside.py), or while the host has shut the gate: then the server ends, and the next one starts. HAProxy
-- itself tries a Unix socket again at once, and has used up its tries in a millisecond.
local function word(path)
  local file = io.open(path)
  local found = file and file:read("l")
  if file then file:close() end
  return found
end

core.register_action("wait_for_server", {"http-req"}, function(txn, seconds, gate, state)
  local last = core.now().sec + tonumber(seconds)
  while true do
    local found = word(gate) or word(state)
    if found == "up" then
      txn:set_var("txn.listens", true)
      return
    end
    if found == "down" or core.now().sec >= last then return end
    core.msleep(250)
  end
end, 3)
