-- Chooses the slot whose server is asked: the host names it in a file. A request waits here while nobody listens there:
-- HAProxy itself tries a Unix socket again at once, and has used up its tries in a millisecond.
local known -- for the moment in which the host writes it

core.register_action("choose_slot", {"http-req"}, function(txn, seconds, slot_file, sockets)
  local last = core.now().sec + tonumber(seconds)
  while true do
    local file = io.open(slot_file)
    known = file and file:read("l") or known
    if file then file:close() end
    local slot = known
    if slot then
      local probe = core.tcp()
      local answers = probe:connect("unix@" .. sockets .. "/" .. slot .. "/s")
      probe:close()
      if answers then
        txn:set_var("txn.slot", slot)
        return
      end
      local down = io.open(sockets .. "/" .. slot .. "/down") -- with a word in it: it failed too often, and stays so
      local stays = down and down:read(1)
      if down then down:close() end
      if stays then return end
    end
    if slot and (core.now().sec >= last or not txn.req:may_recv()) then return end
    core.msleep(250)
  end
end, 3)
