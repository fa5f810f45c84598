// Reused memory for large outputs; see _memory.py. All of this runs under the GIL.
#pragma once
#include <Python.h>
#include <stdint.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace memory {

// What looks at a block finds: nobody else holds its memory, somebody does, or it is no longer what it
// was.
enum State { FREE, HELD, SPOILED };

// As sys.getrefcount counts, which is right in every version of Python.
Py_ssize_t references(PyObject *object);

// What is said of a pool outside.
struct Account {
  int64_t most = 0;  // bytes that may be kept
  int64_t kept = 0;

  virtual void clear() = 0;

 protected:
  ~Account() = default;
};

// Blocks that are kept while they are in use, too, since nobody says when they are free: they are looked
// at. By size. A Block has `State look(int64_t size) const`; what it holds is let go with it.
template <class Block> class Pool final : public Account {
 public:
  // How many blocks of a size are looked at, from the newest and from the oldest end.
  static constexpr int LOOKS = 8;

  // A free block of this size, which is the newest now, or none. Nobody else takes it while the caller
  // has it.
  std::shared_ptr<Block> take(int64_t size) {
    Shelf *const shelf = busy_ ? nullptr : find(size);
    if (!shelf) return nullptr;
    const Busy busy(*this);
    auto &blocks = shelf->blocks;
    const int count = (int)std::min(blocks.size(), (size_t)(2 * LOOKS)), last = (int)blocks.size() - 1;
    for (int look = 0; look < count; look++) {
      const int i = look < LOOKS ? last - look : look - LOOKS;
      const State state = look_at(blocks[i], size);
      if (state == HELD) continue;
      const std::shared_ptr<Block> block = blocks[i];
      if (i != last || state == SPOILED) blocks.erase(blocks.begin() + i);
      if (state == FREE) {
        if (i != last) blocks.push_back(block);
        return block;
      }
      kept -= size;
      return nullptr;
    }
    return nullptr;
  }

  // Keeps a block, where there is room for it.
  bool keep(const std::shared_ptr<Block> &block, int64_t size) {
    if (busy_ || size > most) return false;
    const Busy busy(*this);
    drop_spoiled();
    if (!make_room(size)) return false;
    Shelf *shelf = find(size);
    if (!shelf) shelf = &*shelves_.insert(shelves_.end(), {size, {}});
    shelf->blocks.push_back(block);
    kept += size;
    return true;
  }

  // In a forked child, where another thread may have been at it.
  void renew() { busy_ = false; }

  void clear() override {
    if (busy_) {
      must_clear_ = true;
      return;
    }
    const std::vector<Shelf> gone = std::move(shelves_);
    shelves_.clear();
    kept = 0;
  }

 private:
  struct Shelf {
    int64_t size;
    std::vector<std::shared_ptr<Block>> blocks;  // newest last
  };

  // Looking at blocks and letting them go may run a collection of garbage, which may normalize, too,
  // or let another thread in: there nothing is found, and nothing kept.
  struct Busy {
    Pool &pool;
    explicit Busy(Pool &p) : pool(p) { pool.busy_ = true; }
    Busy(const Busy &) = delete;
    ~Busy() {
      pool.busy_ = false;
      if (pool.must_clear_) pool.must_clear_ = false, pool.clear();
    }
  };

  std::vector<Shelf> shelves_;
  size_t next_shelf_ = 0, next_block_ = 0;  // that drop_spoiled looks at
  bool busy_ = false, must_clear_ = false;

  Shelf *find(int64_t size) {
    for (Shelf &shelf : shelves_)
      if (shelf.size == size) return &shelf;
    return nullptr;
  }

  static State look_at(const std::shared_ptr<Block> &block, int64_t size) {
    return block.use_count() > 1 ? HELD : block->look(size);
  }

  // Looks at the next few blocks in turn, and lets those go that are no longer what they were: they may
  // hold more than is counted, or shared memory and its file. Of a size that does not come again,
  // nobody else looks at them.
  void drop_spoiled() {
    for (int steps = 4; steps && !shelves_.empty(); steps--) {
      if (next_shelf_ >= shelves_.size()) next_shelf_ = next_block_ = 0;
      auto &blocks = shelves_[next_shelf_].blocks;
      if (next_block_ >= blocks.size()) {
        next_block_ = 0;
        if (blocks.empty()) shelves_.erase(shelves_.begin() + next_shelf_);
        else next_shelf_++;
      } else if (look_at(blocks[next_block_], shelves_[next_shelf_].size) != SPOILED) {
        next_block_++;
      } else {
        const std::shared_ptr<Block> block = blocks[next_block_];
        blocks.erase(blocks.begin() + next_block_);
        kept -= shelves_[next_shelf_].size;
      }
    }
  }

  // Lets free blocks go, oldest first, until so many more bytes fit. Few are looked at, so that a full
  // pool of blocks in use costs no more than an empty one. Those that stay are looked at last next
  // time.
  bool make_room(int64_t size) {
    int looks = 2 * LOOKS;
    const auto fits = [&] { return kept + size <= most; };
    for (size_t count = shelves_.size(); count && looks && !fits(); count--) {
      Shelf shelf = std::move(shelves_.front());
      shelves_.erase(shelves_.begin());
      auto &blocks = shelf.blocks;
      for (int i = std::min(looks, (int)blocks.size()); i && !fits(); i--, looks--) {
        const State state = look_at(blocks.front(), shelf.size);
        const std::shared_ptr<Block> block = blocks.front();
        blocks.erase(blocks.begin());
        if (state == HELD) blocks.push_back(block);
        else kept -= shelf.size;
      }
      if (!blocks.empty()) shelves_.push_back(std::move(shelf));
    }
    return fits();
  }
};

}  // namespace memory
