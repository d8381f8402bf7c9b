package distribute

import (
	"maps"
	"slices"
	"strings"
	"sync"
)

// CollectiveKeys numbers groups of devices and the collectives of each group. Members compute the same numbers
// without communication (TensorFlow's CollectiveKeys). Share one between several [CollectiveAllReduce] to tell
// their communicators apart in errors and logs. Its methods may be called concurrently.
type CollectiveKeys struct {
	mu        sync.Mutex
	next      int            // group key
	groups    map[string]int // by the devices, in their order
	instances map[int]map[string]int
}

// The first instance key of every device in every group, as in TensorFlow.
const firstInstanceKey = 100

// NewCollectiveKeys returns keys whose groups are numbered from start. TensorFlow's default is 1.
func NewCollectiveKeys(start int) *CollectiveKeys {
	return &CollectiveKeys{next: start, groups: map[string]int{}, instances: map[int]map[string]int{}}
}

// GroupKey returns the number of the group of these devices. The same devices in the same order have the same
// number.
func (k *CollectiveKeys) GroupKey(devices []string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	name := strings.Join(devices, ",")
	key, known := k.groups[name]
	if !known {
		key = k.next
		k.next++
		k.groups[name] = key
		k.instances[key] = map[string]int{}
		for _, d := range devices {
			k.instances[key][d] = firstInstanceKey
		}
	}
	return key
}

// InstanceKey returns the number of the next collective of a device in a group. It is an error if the group
// does not have the device.
func (k *CollectiveKeys) InstanceKey(group int, device string) (int, error) {
	const op = "InstanceKey"
	k.mu.Lock()
	defer k.mu.Unlock()
	devices, ok := k.instances[group]
	if !ok {
		return 0, errorf(op, ErrInvalid, "Group %d is not found.", group)
	}
	key, ok := devices[device]
	if !ok {
		return 0, errorf(op, ErrInvalid, "Device %s is not present in group %d", device, group)
	}
	devices[device] = key + 1
	return key, nil
}

// Clone returns an independent copy, which continues with the same numbers.
func (k *CollectiveKeys) Clone() *CollectiveKeys {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := &CollectiveKeys{next: k.next, groups: maps.Clone(k.groups), instances: map[int]map[string]int{}}
	for _, group := range slices.Sorted(maps.Keys(k.instances)) {
		out.instances[group] = maps.Clone(k.instances[group])
	}
	return out
}
