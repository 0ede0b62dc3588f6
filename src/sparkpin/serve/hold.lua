-- Chooses the slot whose server is asked: the host names it in a file. A request waits here while that server does not
-- listen, by the word that process 1 of it has left (releases/inside.py). HAProxy itself tries a Unix socket again at
-- once, and has used up its tries in a millisecond.
local slot -- for the moment in which the host writes it

local function word(path)
  local file = io.open(path)
  local found = file and file:read("l")
  if file then file:close() end
  return found
end

core.register_action("choose_slot", {"http-req"}, function(txn, seconds, slot_file, sockets)
  local last = core.now().sec + tonumber(seconds)
  while true do
    slot = word(slot_file) or slot
    local state = slot and word(sockets .. "/" .. slot .. "/state")
    if state == "up" then
      txn:set_var("txn.slot", slot)
      return
    end
    if state == "down" or core.now().sec >= last or not txn.req:may_recv() then return end
    core.msleep(250)
  end
end, 3)
